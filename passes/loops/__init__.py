"""Expert loops: E copies of one expert's subgraph, each on the rows that its expert got, rolled into one.

values   what each node of a normalised region is to the loop (masks, places, rows, sums so far)
unify    whether the copies compute the same, and which parameter of each stands in which slot
roll     the region again with one copy, on all routed rows in expert order
slot_lists, slot_roll   lists of experts over the slots of a buffer, found and rolled
"""
