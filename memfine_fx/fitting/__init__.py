"""Fitting: will a model train on a device, answered from its config, without the device and without its weights.

In: a config (or whatever makes a model), a training setup, bytes of memory. Out: `FitReport`.
One idea: nothing is estimated by formula that the pipeline can be asked. The model is made of fake tensors, a step of
it is captured, read, planned and partitioned as a real one is, and what Inductor would write for it is read instead of
built; so the answer is that of the record which a real run would plan by. Where the model repeats equal layers, it is
shortened to a few repeats and to one more, and the rest follows exactly (`stack`, `stretch`).
Beside it stand the same step without us (`alternatives`) and, where nothing fits, what would need less (`changes`).
It runs nothing and measures nothing: what only a device can tell (`cuda_terms`) is a line of its own in the answer.
"""
