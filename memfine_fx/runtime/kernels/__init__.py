"""A layer of experts in Triton kernels over fixed windows of routed rows, without a host synchronisation.

Terms
    row         a routed assignment (token, choice) in expert order; row r of the layer is of assignment order[r]
    window i    rows [iR, (i+1)R), across the experts' borders: their number follows from T, K and R on the host
    tile        at most M rows of one expert inside a window; a program finds its own from the offsets on the device
    T, H, E, K, F, N, R as everywhere; N = T*K

One layer, forward:  sort (`sorting`), then per window `gate_up` and `down`; `combine` where results must be the same
                     in every run, otherwise `down` adds to the tokens atomically.
Backward, per window: `gate_up` again unless its products were kept, `down_backward` (what the activation and the
                     routing weight pass on), `down` for the tokens' gradient, and `weight_gradient`, straight into
                     the tables.

`layer.swiglu_experts` is the whole of it as a differentiable function. Every module has its kernel, the function that
launches it and, under `reference_...`, the same in plain torch; `traffic` says what each loads and stores. Needs
Triton, except for `windows`, `window_size`, `traffic`, `tables`, `packed`, `tiling` and `launches`. Tables may be made
tile by tile (`made`).
docs/gpu.md says what was measured and checked, and how. `cross_entropy` is of heads: losses and gradients of logits.
"""
