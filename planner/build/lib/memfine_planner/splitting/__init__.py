"""Plans split federated training: every device keeps the first part of a model, a server the rest.

    graph       where a traced model can be cut, and what each cut costs
    leakage     what of the input can be rebuilt from what a cut sends
    latency     seconds of a round by cut and shares; the fleet file
    market      cuts and shares by posted prices, with a bound
    baselines   the optimum of small instances, and plain ways
    command     `memfine plan split`

`examples/split_federated.py` runs a plan over processes.

Follows the problem of DP-MORA (arXiv 2402.06123); its formulas were not available to us.
"""
