"""Split federated training as planned, over processes: rank 0 is the server, every other rank a device.

    python examples/split_federated.py [--model FILE:FACTORY] [--fleet FILE] [--rounds 3]

plans the fleet, then trains on made-up batches with the chosen cuts and prints the loss of every round.

A round:
    1. the server sends every device its side of the global model;
    2. batch by batch a device runs its side, sends activation and labels, gets the activation's gradient back; both
       ends take a step of SGD. The server serves its devices side by side, each with a copy of the server's side;
    3. the device returns its side; the server averages every parameter over the devices, weighted by samples, wherever
       it was trained. Buffers such as running statistics stay where they are.

So a round is federated averaging of the unsplit model, to the bit, whatever the cuts.

With a `Pace` the round takes the time of the planned fleet: what an end computes is waited for as many times longer as
this machine is faster (CPU time of the thread, so other load does not count), and what is sent takes its bytes' time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import backward
from torch.multiprocessing.spawn import spawn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from memfine_planner.splitting.graph import Halves, Traced, find_cuts, load_model, split, trace
from memfine_planner.splitting.latency import load_fleet, offers
from memfine_planner.splitting.market import choose

__all__ = ["Job", "Outcome", "Pace", "average", "batches", "step", "train"]

_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Pace:
    """How much slower than this machine the two ends of one device are, and the bytes/s between them."""

    device_slowdown: float
    server_slowdown: float
    link_bytes_per_s: float


@dataclass(frozen=True)
class Job:
    """What is trained and how.

    Args:
        target: a model that `load_model` knows.
        cuts: index of every device's cut among find_cuts.
        batches: per device and round.
        paces: per device; empty to run as fast as this machine does.
    """

    target: str
    cuts: tuple[int, ...]
    batches: tuple[int, ...]
    rounds: int = 1
    learning_rate: float = 0.05
    seed: int = 0
    paces: tuple[Pace, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The trained parameters by name, the mean loss of every round, and its seconds."""

    parameters: dict[str, Tensor]
    losses: tuple[float, ...]
    seconds: tuple[float, ...]


def train(job: Job) -> Outcome:
    """Run the job in 1 + len(job.cuts) processes of this machine; an error in one is raised here."""
    with TemporaryDirectory() as folder:
        spawn(_run, (job, folder), nprocs=1 + len(job.cuts))
        loaded = torch.load(Path(folder) / "outcome.pt")
    return Outcome(loaded["parameters"], tuple(loaded["losses"]), tuple(loaded["seconds"]))


def batches(job: Job, device: int, round_: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A device's batches of one round: random inputs, labels by a fixed rule that can be learnt."""
    model, example = _model(job)
    num_classes = model(example).shape[-1]
    generator = torch.Generator().manual_seed(1_000_003 * job.seed + 1009 * device + round_)
    rule = torch.randn(example.shape[1], num_classes, generator=torch.Generator().manual_seed(job.seed))
    for _ in range(job.batches[device]):
        if example.is_floating_point():
            means = torch.randn(*example.shape[:2], generator=generator)
            noise = torch.randn(example.shape, generator=generator)
            spread = means.reshape(*means.shape, *(1,) * (example.dim() - 2))
            yield spread + 0.3 * noise, (means @ rule).argmax(1)
        else:
            ids = torch.randint(0, num_classes, example.shape, generator=generator)
            yield ids, (3 * ids + 1) % num_classes


def step(parameters: Sequence[Tensor], learning_rate: float) -> None:
    """Plain SGD; gradients are dropped."""
    with torch.no_grad():
        for one in parameters:
            if one.grad is not None:
                one -= learning_rate * one.grad
                one.grad = None


def average(states: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Every parameter's weighted mean over the devices."""
    total = sum(weights)
    pairs = list(zip(weights, states, strict=True))
    return {name: sum((w / total * one[name] for w, one in pairs), torch.zeros(())) for name in states[0]}


def _model(job: Job) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(job.seed)
    return load_model(job.target)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def _run(rank: int, job: Job, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, _TIMEOUT, len(job.cuts) + 1, rank)
    try:
        if rank:
            _Device(job, rank - 1, trace(*_model(job)), is_server=False).run()
        else:
            _serve(job, Path(folder))
    finally:
        dist.destroy_process_group()


class _End:
    """One end of one device's link: its half of the model, and messages at the fleet's pace."""

    def __init__(self, job: Job, device: int, traced: Traced, *, is_server: bool) -> None:
        self.job, self.device, self.traced = job, device, traced
        self.peer = device + 1 if is_server else 0
        self.cut = find_cuts(traced)[job.cuts[device]]
        # Parameters of its own: the server trains one side for every device.
        self.halves: Halves = split(traced, self.cut, copied=True)
        half = self.halves.server if is_server else self.halves.device
        self.parameters = dict(half.named_parameters()) if half else {}
        pace = job.paces[device] if job.paces else Pace(1.0, 1.0, float("inf"))
        self.slowdown = pace.server_slowdown if is_server else pace.device_slowdown
        self.bytes_per_s = pace.link_bytes_per_s

    @contextmanager
    def computing(self) -> Iterator[None]:
        """What runs inside takes as long as on the planned machine."""
        start = time.thread_time()
        yield
        time.sleep((time.thread_time() - start) * (self.slowdown - 1))

    def send(self, tensor: Tensor, *, paced: bool = True) -> None:
        if paced:
            time.sleep(tensor.numel() * tensor.element_size() / self.bytes_per_s)
        dist.send(tensor.detach().contiguous(), self.peer)

    def receive(self, like: Tensor) -> Tensor:
        received = torch.empty(like.shape, dtype=like.dtype)
        dist.recv(received, self.peer)
        return received

    def flat(self) -> Tensor:
        return parameters_to_vector(self.parameters.values()).detach() if self.parameters else torch.zeros(0)

    def load(self, flat: Tensor) -> None:
        if self.parameters:
            vector_to_parameters(flat, self.parameters.values())


class _Device(_End):
    def run(self) -> None:
        for round_ in range(self.job.rounds):
            dist.barrier()
            self.load(self.receive(self.flat()))
            for inputs, labels in batches(self.job, self.device, round_):
                self._batch(inputs, labels)
            self.send(self.flat())

    def _batch(self, inputs: Tensor, labels: Tensor) -> None:
        half = self.halves.device
        if half is None:
            self.send(inputs)
            return self.send(labels, paced=False)
        if self.halves.server is None:
            with self.computing():
                loss = _loss(half(inputs), labels)
                backward(loss)
                step(list(self.parameters.values()), self.job.learning_rate)
            return self.send(loss, paced=False)
        with self.computing():
            sent = half(inputs)
        self.send(sent)
        self.send(labels, paced=False)
        gradient = self.receive(sent)
        with self.computing():
            backward(sent, gradient)
            step(list(self.parameters.values()), self.job.learning_rate)
        return None


class _Service(_End):
    """The server's end of one device's link."""

    def __init__(self, job: Job, device: int, traced: Traced) -> None:
        super().__init__(job, device, traced, is_server=True)
        self.device_parameters = dict(self.halves.device.named_parameters()) if self.halves.device else {}
        value = {node.name: node.meta["val"] for node in self.traced.module.graph.nodes if "val" in node.meta}
        self.sent = value[self.cut.node]
        self.labels = torch.empty(value[self.traced.output.name].shape[:-1], dtype=torch.int64)

    def round(self, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
        """Train one round from the global parameters; returns this device's, and its mean loss."""
        ours = {**self.device_parameters, **self.parameters}
        with torch.no_grad():
            for name, one in ours.items():
                one.copy_(state[name])
        away = list(self.device_parameters.values())
        flat = parameters_to_vector(away).detach() if away else torch.zeros(0)
        self.send(flat)
        num_batches = self.job.batches[self.device]
        losses = [self._batch() for _ in range(num_batches)]
        returned = self.receive(flat)
        if away:
            vector_to_parameters(returned, away)
        return {name: one.detach().clone() for name, one in ours.items()}, sum(losses) / num_batches

    def _batch(self) -> float:
        half = self.halves.server
        if half is None:
            return float(self.receive(torch.zeros(())))
        sent = self.receive(self.sent)
        labels = self.receive(self.labels)
        trains_device = self.halves.device is not None
        with self.computing():
            loss = _loss(half(sent.requires_grad_(trains_device)), labels)
            backward(loss)
            step(list(self.parameters.values()), self.job.learning_rate)
        if trains_device:
            assert sent.grad is not None
            self.send(sent.grad)
        return loss.item()


def _serve(job: Job, folder: Path) -> None:
    model, example = _model(job)
    traced = trace(model, example)
    services = [_Service(job, device, traced) for device in range(len(job.cuts))]
    state = {name: one.detach().clone() for name, one in model.named_parameters()}
    losses, times = [], []
    with ThreadPoolExecutor(len(services)) as pool:
        for _ in range(job.rounds):
            dist.barrier()
            start = time.perf_counter()
            results = list(pool.map(_Service.round, services, [state] * len(services)))
            times.append(time.perf_counter() - start)
            state = average([trained for trained, _ in results], job.batches)
            losses.append(sum(loss for _, loss in results) / len(results))
    torch.save({"parameters": state, "losses": losses, "seconds": times}, folder / "outcome.pt")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(Path(__file__).parent / "split_models.py") + ":small_cnn")
    parser.add_argument("--fleet", type=Path, default=Path(__file__).parent / "split_fleet.yaml")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    fleet = load_fleet(options.fleet)
    model, example = load_model(options.model)
    cuts = find_cuts(trace(model, example))
    leakage = [fleet.leakage[cut.node] for cut in cuts] if fleet.leakage else []
    devices = [offers(cuts, device, fleet.server, leakage) for device in fleet.devices]
    plan = choose(devices)
    chosen = tuple(own.cuts[position] for own, position in zip(devices, plan.positions, strict=True))
    for device, index in zip(fleet.devices, chosen, strict=True):
        print(f"{device.name:12} cuts at {cuts[index].place}")
    num_batches = tuple(max(1, device.samples // (32 * len(example))) for device in fleet.devices)
    outcome = train(Job(options.model, chosen, num_batches, options.rounds, learning_rate=0.1))
    print("loss of every round:", ", ".join(f"{loss:.3f}" for loss in outcome.losses))


if __name__ == "__main__":
    main()
