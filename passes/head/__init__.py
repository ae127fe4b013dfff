"""Head: finds language models' heads, a projection to a vocabulary whose results only a cross-entropy reads.

In: a captured graph. Out: a `HeadRegion` for each loss whose logits need never exist whole, or a refusal that names
the node that reads them.
One idea: every loss is a seed, followed back to its projection; whatever stands between must act on single logits or
move whole tokens, so that tokens can be taken a chunk at a time.
It only reads: lowering is in `lower.head`, verifying in `verify.head`, tokens a chunk are the plan's.
"""
