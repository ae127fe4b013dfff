"""What is awake while a step runs: the op pair, the chunk loop, the index arrays, the store of bodies and plans."""
