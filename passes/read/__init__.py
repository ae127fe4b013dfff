"""Read: from a graph of Dynamo to regions, or to refusals with their reasons.

In     one graph with recorded fake values, and the modes in which it starts.
Out    a region (`records.MoERegion`) for each routing decision whose experts were understood, else why not.
Idea   what a routing decision reaches runs once as functional ATen on fake tensors; every call gets one value of one
       lattice (`values`) by one table of rules (`rules`); the region is read off where tokens are complete again.
Never  changes what the graph computes (ids of a mask may be written into it, see `dropped`), knows of bytes or plans,
       or matches a spelling: spellings fall out of the rules.

    seeds -> normal_form -> reader + rules -> expressions -> extraction -> removable

`regions` runs this for each routing decision, and `slots` is a second reader, for rows in their experts' slots.
"""
