"""Plan what to rent and how to run it, from sizes and data sheets, before anything runs.

    hardware    systems of every vendor, and who reaches whom over what
    costs       what a layer does, how long that takes, what a collective takes
    training    parallel strategy, memory under bad routing, failures: `memfine plan training`
    serving     prefill and decode apart, on the devices one has: `memfine plan serving`
    splitting   a model split between devices and a server: `memfine plan split`

Rooms import downwards: planners import costs, costs import hardware. Of memfine_fx the planner imports the closed form
and the published table (`memfine_fx.memory`), and private names of torch (`memfine_fx.compat`). memfine_fx imports
nothing of the planner: `memfine plan NAME` finds it by entry points.
"""
