"""Plan: decides from bytes and seconds how many rows a chunk has and what forward keeps for backward.

In: byte terms (`memory`), rates of the device, the budget, and which runs make a step (`runs`). Out: plans of
regions, heads and steps, or the smallest budget that would do.
One idea: the peak grows with the rows of a chunk, so the largest number that fits is found exactly, by bisection.
Bytes decide which plans are possible, seconds only rank those: a wrong estimate of time can make a step slower, but
not too large.
`rows`, `head_tokens`, `keeping`, `kept` (of how many rows a run keeps something) and `knee` (how few rows are as fast
as more) are pure functions of numbers and records. No module here knows a pass, a session or a compiler: what is asked
of them is written down as a protocol (`budget.SessionState`, `runs.CalledGraph`).
"""
