"""`fit`: bad input is named, the answer adds up, and a real step takes what was said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._sympy.functions import FloorDiv, Mod

import memfine_fx
from memfine_fx.cli import main
from memfine_fx.demo.tiny import tiny_causal_lm
from memfine_fx.errors import ConfigError
from memfine_fx.fitting.models import fake_model, loaded_config
from memfine_fx.fitting.recording import RecordedStep, what_failed
from memfine_fx.fitting.setup import OptimizerName, Setup, optimizer_bytes
from memfine_fx.memory.kernel_scratch import gradient_scratch
from memfine_fx.memory.measure import trace_memory
from memfine_fx.memory.sizes import ROWS
from memfine_fx.memory.step import GraphStep, RunMemory
from tests.memory.scratch_cases import takes_more_in_tiles

TINY: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=512,
    num_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=1024,
    use_cache=False,
)


def config_of(model_type: str = "qwen3_moe", **overrides: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.CONFIG_MAPPING[model_type](**{**TINY, **overrides})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (dict(num_key_value_heads=3), "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        (dict(num_experts_per_tok=9), "num_experts_per_tok=9 exceeds num_experts=8"),
        (dict(hidden_size=0), "hidden_size=0 must be a positive int"),
        (dict(num_hidden_layers=0), "num_hidden_layers=0 must be a positive int"),
        (dict(vocab_size=-1), "vocab_size=-1 must be a positive int"),
        (dict(n_group=3), "num_experts=8 is no multiple of n_group=3"),
        (
            dict(num_attention_heads=3, num_key_value_heads=1, head_dim=None),
            "hidden_size=64 is no multiple of num_attention_heads=3, and there is no head_dim",
        ),
    ],
)
def test_sizes_that_cannot_be_are_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        memfine_fx.fit(config_of(**given))


def test_a_field_that_the_model_reads_and_the_config_lacks_is_named() -> None:
    config = config_of()

    def factory() -> torch.nn.Module:
        return torch.nn.Linear(config.hidden_size, config.no_such_width)

    with pytest.raises(ConfigError, match="Qwen3MoeConfig lacks the field 'no_such_width', which the model reads"):
        memfine_fx.fit(factory)


def test_an_unknown_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the environment is read at its import
    with pytest.raises(ConfigError, match=r"'no_such_family' is no folder, no config\.json, no model type"):
        memfine_fx.fit("no_such_family")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (dict(hidden_size=8), "lacks the field 'model_type'"),
        (dict(model_type="no_such_moe"), "model_type='no_such_moe' is none of transformers"),
    ],
)
def test_a_config_file_of_no_known_family_says_so(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(ConfigError, match=named):
        memfine_fx.fit(str(tmp_path))


def with_code(folder: Path, **fields: Any) -> Path:
    """Write a checkpoint's config and a module that its `auto_map` names; return the file that the module would write.

    Modules of transformers stand in the same place, whether or not the family is known.
    """
    sentinel = folder / "code_has_run"
    (folder / "modeling_evil.py").write_text(
        f"open({str(sentinel)!r}, 'w').close()\n"
        "from transformers import Qwen3MoeConfig as EvilConfig, Qwen3MoeForCausalLM as EvilModel\n",
        encoding="utf-8",
    )
    classes = {"AutoConfig": "modeling_evil.EvilConfig", "AutoModel": "modeling_evil.EvilModel"}
    auto_map = classes | {"AutoModelForCausalLM": "modeling_evil.EvilModel"}
    text = json.dumps(fields | {"auto_map": auto_map, "trust_remote_code": True})
    (folder / "config.json").write_text(text, encoding="utf-8")
    return sentinel


@pytest.mark.parametrize("source", ["folder", "file", "relative"])
def test_code_of_a_checkpoint_of_a_known_family_is_not_run(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("builtins.input", lambda prompt: "y")  # what transformers asks on a terminal
    sentinel = with_code(tmp_path, model_type="qwen3_moe", **TINY)
    monkeypatch.chdir(tmp_path)
    path = {"folder": tmp_path, "file": tmp_path / "config.json", "relative": "."}[source]
    config = loaded_config(str(path))
    assert config.auto_map and config.trust_remote_code is True
    model = fake_model(config, Setup(), FakeTensorMode())
    assert type(model) is transformers.Qwen3MoeForCausalLM
    assert not sentinel.exists()


def test_code_of_a_checkpoint_of_an_unknown_family_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    sentinel = with_code(tmp_path, model_type="no_such_moe", **TINY)
    with pytest.raises(ConfigError, match=r"model_type='no_such_moe' is none of .*; code .* \(auto_map\) is not run"):
        memfine_fx.fit(str(tmp_path))
    fields = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    with pytest.raises(ConfigError, match="dict is no config of transformers"):
        memfine_fx.fit(fields)
    assert not sentinel.exists()


def test_code_of_a_name_on_the_hub_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    sentinel = with_code(tmp_path, model_type="no_such_moe", **TINY)
    from_pretrained = transformers.AutoConfig.from_pretrained

    def of_a_folder(name: str, **options: Any) -> Any:
        """The hub's files are in a folder."""
        return from_pretrained(str(tmp_path), **options)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", of_a_folder)
    with pytest.raises(ConfigError, match=r"no config of this name could be loaded: .* contains custom code"):
        memfine_fx.fit("someone/a_checkpoint")
    assert not sentinel.exists()


def test_a_field_of_another_type_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    fields = {"model_type": "qwen3_moe", "hidden_size": "wide"}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(ConfigError, match="hidden_size"):
        memfine_fx.fit(str(tmp_path))


def test_a_model_that_predicts_no_next_token_is_named() -> None:
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="model_type='t5' has no causal language model in transformers"):
        memfine_fx.fit(transformers.CONFIG_MAPPING["t5"]())


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (dict(batch=0), "batch=0 must be a positive int"),
        (dict(seq=1), "seq=1: a language model's loss needs two tokens"),
        (dict(dtype="int4"), "dtype='int4' is unknown"),
        (dict(optimizer="adam9"), "optimizer='adam9' is unknown"),
        (dict(memory=0.5), "memory=0.5: there is no device"),
        (dict(memory="eightyGB"), "memory='eightyGB' is not understood; expected an int of bytes, or text such as"),
        (dict(memory_budget=0.5), "memory_budget=0.5: there is no device"),
        (dict(device="tpu"), "device='tpu' is unknown"),
        (dict(gpu="h9000"), "gpu='h9000' is unknown; known: t4, "),
        (dict(gpu="h100", memory="80GiB"), "memory='80GiB' and gpu='h100': give one of them"),
        (dict(fsdp=0), "fsdp=0 must be a positive int"),
        (dict(accumulate=0), "accumulate=0 must be a positive int"),
        (dict(fsdp=2, expert_parallel=2), "fsdp=2 with expert_parallel=2: give one of them"),
    ],
)
def test_a_setup_that_cannot_be_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        memfine_fx.fit(object(), **given)


def test_what_is_no_model_is_named() -> None:
    with pytest.raises(ConfigError, match="object is no config of transformers and makes no module"):
        memfine_fx.fit(object())


def test_a_step_that_fails_is_told_by_what_was_raised_and_where() -> None:
    """Dynamo begins with the kind of its own failure, which says nothing of the model."""
    text = """RuntimeError when making fake tensor call
  Explanation: Dynamo failed to run FX node with fake tensors: call_function <built-in function add>(*(FakeTensor(...),
               FakeTensor(...)), **{}): got TypeError('can only concatenate tuple (not "FakeTensor") to tuple')
  Hint: Your code may result in an error when running in eager.

from user code:
   File "model.py", line 7, in forward
    return self.mlp(rows)
   File "layer.py", line 1102, in forward
    result = result + lora_B(lora_A(rows))

Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace"""
    assert what_failed(RuntimeError(text)) == (
        "TypeError('can only concatenate tuple (not \"FakeTensor\") to tuple'), "
        'at File "layer.py", line 1102, in forward result = result + lora_B(lora_A(rows))'
    )
    assert what_failed(ValueError("seq is odd\nand long")) == "seq is odd"
    assert what_failed(ValueError()) == ""


def real_step(
    config: Any, *, batch: int, seq: int, dtype: torch.dtype, budget: Any = None, micro_batches: int = 1
) -> int:
    """Peak of a real training step: all tokens alike, so that each of K experts gets a row of every token."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=dtype).train()
    memfine_fx.optimize(model, dynamic=True, memory_budget=budget)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    tokens = torch.full((batch, seq), 7)

    def step() -> None:
        for _ in range(micro_batches):
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    if micro_batches > 1:  # with gradients and with state the graphs may be compiled again
        step()
    there = sum(one.nbytes for one in (*model.parameters(), *model.buffers(), tokens, tokens))
    there += sum(one.nbytes for state in optimizer.state.values() for one in state.values())
    return there + trace_memory(step, torch.device("cpu")).peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "budget", "most"), [("fp32", None, 1.02), ("bf16", None, 1.03), ("bf16", "least", 1.03)]
)
def test_a_real_step_takes_what_was_said(dtype: str, budget: str | None, most: float) -> None:
    """Without a budget regions may keep what is free, which changes the code around them."""
    if dtype == "bf16" and takes_more_in_tiles():  # what the probe measured there is counted in proportion
        most = 1.1
    config, of_torch = config_of(), {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    report = memfine_fx.fit(config, batch=2, seq=256, dtype=dtype, memory_budget=budget)
    assert report.asked is not None
    measured = real_step(config, batch=2, seq=256, dtype=of_torch, budget=budget)
    assert 0.99 * measured <= report.asked.num_bytes <= most * measured
    assert sum(num_bytes for _, num_bytes in report.asked.terms) == report.asked.num_bytes
    assert report.least.num_bytes <= 1.02 * report.asked.num_bytes


@pytest.mark.slow
@pytest.mark.parametrize("budget", [pytest.param(None, marks=pytest.mark.campaign), "least"])
def test_micro_batches_that_accumulate_take_what_was_said(budget: str | None) -> None:
    """Gradients of the first exist while the second runs, whose experts' gradients are added in place."""
    given: dict[str, Any] = dict(batch=2, seq=256, dtype="fp32", memory_budget=budget)
    alone, report = (memfine_fx.fit(config_of(), **given, accumulate=number) for number in (1, 2))
    assert report.asked is not None and alone.asked is not None
    measured = real_step(config_of(), batch=2, seq=256, dtype=torch.float32, budget=budget, micro_batches=2)
    assert 0.99 * measured <= report.asked.num_bytes <= 1.02 * measured
    assert report.asked.num_bytes > 1.05 * alone.asked.num_bytes
    assert sum(num_bytes for _, num_bytes in report.asked.terms) == report.asked.num_bytes


@pytest.mark.slow
def test_the_command_answers_and_says_by_its_status_whether_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_of(num_hidden_layers=1, use_cache=True).save_pretrained(tmp_path)
    given = ["fit", str(tmp_path), "--batch", "2", "--seq", "64", "--dtype", "fp32", "--device", "cpu", "--json"]
    assert main([*given, "--memory", "64MiB"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["fits"] is True
    assert shown["asked"]["num_bytes"] == sum(shown["asked"]["terms"].values())
    assert shown["line"] == 'memfine_fx.optimize(model, memory_budget="64MiB", dynamic=True)'
    assert shown["longest_seq"] > 64
    assert "model.config.use_cache = False" in shown["estimates"][-1]  # with a cache a step takes more than was said
    assert len(shown["chunked"]) == 1


class Cut(torch.nn.Module):
    """A module in front of which Dynamo cuts the graph."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        found: torch.Tensor = self.inner(hidden)
        return found


def cut_model() -> torch.nn.Module:
    model: Any = tiny_causal_lm("qwen3_moe", hidden_size=64)
    model.model.norm = Cut(model.model.norm)
    return model  # type: ignore[no-any-return]  # of transformers


@pytest.mark.slow
def test_a_step_of_several_graphs_is_answered_at_other_sizes() -> None:
    """Each graph has names of its own for batch and length, and what earlier ones save grows with these."""
    # Long enough that the smallest budget computes everything again at both.
    recorded = memfine_fx.fit(cut_model, batch=2, seq=128, dtype="fp32").analysis
    again = memfine_fx.fit(cut_model, batch=3, seq=160, dtype="fp32")
    assert recorded is not None
    (step,) = recorded.records
    assert len({name for run in step.runs["asked"] for name, size in run.sizes.items() if size == 128}) > 1
    assert [run.saved_bytes for run in step.sized("asked", 2, 128)] == [run.saved_bytes for run in step.runs["asked"]]
    assert recorded.total("least", 3, 160).num_bytes == again.least.num_bytes
    assert recorded.total("most", 3, 160).num_bytes == pytest.approx(again.most.num_bytes, rel=0.002)


def test_sizes_that_the_code_fixes_are_not_answered() -> None:
    run = RunMemory(GraphStep(), {"s1": 2})
    step = RecordedStep({"asked": (run,)}, 2, 64, (), (), "")
    assert step.has_batch and not step.has_seq
    assert step.sized("asked", 5, 64)[0].sizes == {"s1": 5}
    with pytest.raises(ConfigError, match="seq=65: the model's code fixes it in its graphs, recorded with 64"):
        step.sized("asked", 2, 65)


@pytest.mark.parametrize(
    ("guard", "has_seq"),
    [
        (lambda seq: sympy.Eq(FloorDiv(seq, 64), 2), False),  # a loop over blocks of 64 tokens
        (lambda seq: sympy.Eq(Mod(seq, 64), 0), True),
        (lambda seq: seq > 100, True),  # a sliding window that is narrower
        (lambda seq: seq <= 4096, True),
        (lambda seq: sympy.Ne(seq * sympy.Symbol("u0"), 0), True),  # a size that only data decide
    ],
)
def test_a_length_that_guards_fix_is_no_free_one(guard: Callable[[sympy.Symbol], sympy.Basic], has_seq: bool) -> None:
    seq = sympy.Symbol("s2", integer=True, positive=True)
    run = RunMemory(GraphStep(), {"s1": 2, "s2": 128})
    step = RecordedStep({"asked": (run,)}, 2, 128, (), (), "", guards=((guard(seq),),))
    assert step.has_batch and step.has_seq is has_seq


class InBlocks(torch.nn.Module):
    """A language model that walks whole blocks of 64 tokens in Python, or all tokens at once."""

    def __init__(self, *, walks: bool) -> None:
        super().__init__()
        self.walks = walks
        self.embed, self.head = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        hidden = self.embed(input_ids)
        if self.walks:
            state = torch.zeros_like(hidden[:, :64])
            for block in range(input_ids.shape[1] // 64):
                state = torch.tanh(state + hidden[:, 64 * block : 64 * (block + 1)])
            hidden = hidden + state.mean(1, keepdim=True)
        return SimpleNamespace(loss=(self.head(hidden).float().logsumexp(-1) * labels).mean())


@pytest.mark.slow
@pytest.mark.parametrize("walks", [True, False])
def test_a_model_that_walks_blocks_has_no_longest_sequence(walks: bool) -> None:
    report = memfine_fx.fit(lambda: InBlocks(walks=walks), batch=2, seq=130, dtype="fp32", memory="64MiB")
    assert (report.longest_seq is None) is walks
    assert report.largest_batch is not None and report.largest_batch > 2


def parameters_of(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "sgd"])
def test_an_optimizer_of_torch_holds_what_is_said(name: OptimizerName, dtype: torch.dtype) -> None:
    """State after a step, and what the step itself takes, by the allocator's events."""
    made = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor, "sgd": torch.optim.SGD}[name]
    parameters = parameters_of((8, 128, 64), (512, 256), (300,), dtype=dtype)  # the largest behind another
    optimizer = made(parameters, lr=1e-3)

    def step() -> None:
        optimizer.step()

    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    step()
    state = sum(one.nbytes for state in optimizer.state.values() for one in state.values())
    said = optimizer_bytes(parameters, Setup(optimizer=name, dtype="fp32"))
    assert said.state == state
    working = trace_memory(step, torch.device("cpu")).peak_bytes
    blocks = gradient_scratch([(512, 256)], dtype, "cpu").subs(ROWS, 1)  # Adafactor multiplies its two factors
    assert working <= said.working + 64 * 1024 + blocks * (name == "adafactor")


def test_adamw_in_eight_bits_holds_what_bitsandbytes_does() -> None:
    """Two bytes an element and two scales a block of 256; parameters below 4,096 elements are kept in fp32."""
    parameters = parameters_of((64, 65), (4095,), dtype=torch.bfloat16)
    said = optimizer_bytes(parameters, Setup(optimizer="adamw8bit"))
    blocks = -(-64 * 65 // 256)
    assert said.state == 2 * (64 * 65 + 4 * blocks) + 8 * 4095 + 2 * 256 * 4


@pytest.mark.slow
def test_ranks_share_what_goes_with_parameters() -> None:
    alone, shared = (memfine_fx.fit(config_of(), seq=64, dtype="fp32", fsdp=ranks) for ranks in (1, 4))
    assert shared.estimates and not alone.estimates
    held, sharded = (dict(one.least.terms) for one in (alone, shared))
    assert sharded["parameters"] == -(-held["parameters"] // 4)
    assert sharded["optimizer state"] == -(-held["optimizer state"] // 4)


@pytest.mark.slow
def test_what_does_not_fit_is_shown_beside_its_alternatives_and_what_would() -> None:
    report = memfine_fx.fit(config_of(), memory="2MiB", batch=2, seq=64, dtype="fp32", alternatives=True)
    assert report.fits is False and report.line == ""
    names = [one.what for one in report.alternatives]
    assert names[0] == "plain training (torch.compile)" and names[-1] == "gradient checkpointing of layers"
    assert len(names) == 4 and all(one.total is not None for one in report.alternatives)
    changes = {one.what.split("=")[0]: one for one in report.changes}
    assert {"optimizer", "seq", "batch", "fsdp"} <= set(changes)
    assert [one.fits for one in report.changes] == sorted((one.fits for one in report.changes), reverse=True)
    assert json.loads(report.to_json())["alternatives"][0]["total"]["num_bytes"] > 0
