"""Plans serving with prefill and decode apart, on devices of several vendors, and moves caches between them.

    hardware, workload   devices; the request rate, lengths, targets and pool; both checked field by field
    model                seconds and bytes of an instance: prefill, decode, hand-over
    queueing             waiting in closed form; an event simulator in the tests checks it
    choice               which devices, in instances of what size, how many: an integer programme
    validation           published ratios
    disaggregated        a real cache moved between layouts and processes, and generation over it
    command              `memfine plan serving`

Follows the problem of disaggregated inference on GPUs of several vendors (arXiv 2509.17542), whose formulas were not
available to us. Moving caches needs transformers.
"""
