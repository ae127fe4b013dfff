"""Split federated training over processes is federated averaging of the unsplit model, and takes the planned time."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from examples.split_federated import Job, Pace, average, batches, step, train
from memfine_planner.splitting.graph import find_cuts, load_model, trace
from memfine_planner.splitting.latency import Device, Server, offers, seconds

MODELS = str(Path(__file__).resolve().parents[3] / "examples" / "split_models.py") + ":"


def unsplit(job: Job) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Federated averaging in one process, by the model as it is."""
    torch.manual_seed(job.seed)
    model, _ = load_model(job.target)
    losses = []
    for round_ in range(job.rounds):
        start = {name: one.detach().clone() for name, one in model.named_parameters()}
        states, seen = [], []
        for device in range(len(job.cuts)):
            model.load_state_dict(start, strict=False)
            for inputs, labels in batches(job, device, round_):
                loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
                loss.backward()
                step(list(model.parameters()), job.learning_rate)
                seen.append(loss.item())
            states.append({name: one.detach().clone() for name, one in model.named_parameters()})
        model.load_state_dict(average(states, job.batches), strict=False)
        losses.append(sum(seen) / len(seen))
    return {name: one.detach() for name, one in model.named_parameters()}, losses


def host_flops_per_s(job: Job) -> float:
    """This machine on the job's model, forward and backward, by the thread's own CPU time."""
    torch.manual_seed(job.seed)
    model, example = load_model(job.target)
    inputs, labels = next(batches(job, 0, 0))
    times = []
    for _ in range(12):
        start = time.thread_time()
        nn.functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).backward()
        times.append(time.thread_time() - start)
    return 3 * find_cuts(trace(model, example))[0].server_flops * len(example) / sorted(times)[6]


@pytest.mark.slow
@pytest.mark.parametrize("factory", ["small_cnn", "small_transformer"])
def test_split_training_is_federated_averaging_to_the_bit(factory: str) -> None:
    target = MODELS + factory
    last = len(find_cuts(trace(*load_model(target)))) - 1
    job = Job(target, cuts=(0, 2, last), batches=(2, 2, 2), rounds=3, learning_rate=0.1)
    outcome = train(job)
    parameters, losses = unsplit(job)
    assert outcome.parameters.keys() == parameters.keys()
    for name, one in parameters.items():
        assert torch.equal(outcome.parameters[name], one), name
    assert outcome.losses == pytest.approx(losses)
    assert outcome.losses[-1] < outcome.losses[0]


@pytest.mark.slow
def test_measured_rounds_rank_plans_as_predicted() -> None:
    target = MODELS + "small_cnn"
    cuts = find_cuts(trace(*load_model(target)))
    base = Job(target, cuts=(0,), batches=(3,))
    host = host_flops_per_s(base)
    server = Server(flops_per_s=host / 2, link_bytes_per_s=2e5)
    device = Device(name="d", flops_per_s=host / 40, link_bytes_per_s=2e5, samples=24)
    own = offers(cuts, device, server)
    predicted = [seconds(own, index, 1.0, 1.0) for index in range(len(cuts))]
    order = sorted(range(len(cuts)), key=lambda index: predicted[index])
    plans = [order[0], order[len(order) // 2], order[-1]]
    measured = []
    for index in plans:
        job = Job(target, cuts=(index,), batches=(3,), rounds=3, paces=(Pace(40.0, 2.0, 2e5),))
        measured.append(sorted(train(job).seconds)[1])
    print(
        [
            f"{cuts[index].place}: {predicted[index]:.2f} s, measured {took:.2f}"
            for index, took in zip(plans, measured, strict=True)
        ]
    )
    assert measured == sorted(measured)
