"""Plan: decides from bytes and seconds how many rows chunks have and what forward saves for backward.

In: byte terms (`memory`), rates of the device, the budget, and which runs make a step (`runs`). Out: plans of regions,
heads and steps, or the smallest budget that would do.

`solve` decides. `problem` builds its problems, from what is known when a graph is partitioned and when it is called;
`rows` builds those of one region or head. `budget` says which bytes there are. Bytes decide which plans are possible,
seconds only rank those: a wrong estimate of time can make a step slower, but not too large.

No module here knows a pass, a session or a compiler: what is asked of a graph is a protocol (`runs.CalledGraph`).
"""
