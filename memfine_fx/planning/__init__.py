"""The planning annex: what to rent and how to run it, from sizes and data sheets, before anything runs.

    hardware    systems of every vendor, and who reaches whom over what
    costs       what a layer does, how long that takes, what a collective takes
    training    parallel strategy, memory under bad routing, failures: `memfine plan training`
    serving     prefill and decode apart, on the devices one has: `memfine plan serving`
    splitting   a model split between devices and a server: `memfine plan split`
    command     `memfine plan PLANNER`, from a table of planners

Rooms import downwards: planners import costs, costs import hardware. Of the compiler the annex imports the closed form
and the published table alone (`memfine_fx.memory`), and the compiler imports nothing of the annex.
"""
