"""The compiler: the pipeline from one captured graph to a callable, and the sessions that keep what was compiled.

In: torch-level graphs from Dynamo, one at a time, with a session's options. Out: a callable with the graph's
signature, and records of what was found, chosen and refused, from which reports are made.
One idea: every stage hands a record to the next (`pipeline` reads as the list of stages), and a refusal at any stage
leaves that region as its user wrote it; so no stage has to undo another's work. A session follows what a training
loop really does, and a graph is compiled again where what it was planned for no longer holds.
It knows nearly every room, and only the api and the command line know it: passes, plans and the runtime are handed
what they need.
"""
