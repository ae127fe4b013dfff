"""What decides from bytes and seconds."""
