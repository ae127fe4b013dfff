"""A layer of experts in Triton kernels over fixed windows of routed rows, without a host synchronisation.

Terms
    row         a routed assignment (token, choice) in expert order; row r of the layer is of assignment order[r]
    window i    rows [iR, (i+1)R), across the experts' borders: their number follows from T, K and R on the host
    tile        at most M rows of one expert inside a window; a program finds its own from the offsets on the device
    T, H, E, K, F, N, R as everywhere; N = T*K

One layer, forward:  sort (`sorting`), then per window `gate_up` and `down`; `combine` where results must be the same
                     in every run, otherwise `down` adds to the tokens atomically.
Backward, per window: `gate_up` again unless its products were saved, `down_backward` (what the activation and the
                     routing weight pass on), `down` for the tokens' gradient, and `weight_gradient`, straight into
                     the tables.

Modules
    matching, epilogue    does an expert function have a form that the kernels compute; its activation as Triton source
    choice                do the kernels run here, and which tile sizes are fastest
    experts               the layer as the runtime calls it (`runtime.store.ExpertKernels`)
    layer                 forward and backward of a whole layer over windows
    swiglu                the layer as a differentiable function, `swiglu_experts`
    tuning, traffic       times of tile sizes; what each kernel loads and stores
    cross_entropy         losses and gradients of a head's logits

Every other module has a kernel, the function that launches it and, as `reference_...`, the same in plain torch. Triton
is needed by all but `matching`, `epilogue`, `choice`, `experts`, `windows`, `window_size`, `traffic`, `tables`,
`packed`, `tiling` and `launches`. Expert weights may be computed tile by tile (`computed_tables`), as packed ones are.
docs/gpu.md says what was measured and checked, and how.
"""
