"""`import memfine_fx` makes backend="memfine" known, whatever the order of imports, and stays light."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILE = """
compiled = torch.compile(lambda x: x * 2 + 1, backend="memfine", options={"inner_backend": "eager"})
print(float(compiled(torch.tensor(3.0))))
"""


def run_python(source: str, folder: Path, **variables: str) -> str:
    """Output of a fresh interpreter that sees this checkout, under variables of the environment."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


REGISTERED_AGAIN = """
import sys, torch, memfine_fx
from memfine_fx.compiler.registration import register_backend
num_finders = len(sys.meta_path)
register_backend()
assert len(sys.meta_path) == num_finders
import torch._dynamo
known = dict(torch._dynamo.backends.registry._COMPILER_FNS)
register_backend()
assert torch._dynamo.backends.registry._COMPILER_FNS == known
assert len(sys.meta_path) == num_finders - 1
"""


@pytest.mark.parametrize(
    "imports", [REGISTERED_AGAIN, "import torch, torch._dynamo, memfine_fx", "import memfine_fx, torch._dynamo, torch"]
)
def test_the_backend_is_known_before_and_after_dynamo_loads(imports: str, tmp_path: Path) -> None:
    registered = """
import torch._dynamo.backends.registry as registry
assert registry.lookup_backend("memfine") is __import__("memfine_fx.compiler.entry").compiler.entry.memfine
"""
    assert run_python(imports + registered + COMPILE, tmp_path) == "7.0"


CONFIG_FILE = """
from accelerate.utils import TorchDynamoPlugin
print(TorchDynamoPlugin(backend="memfine").to_kwargs()["backend"])
"""


@pytest.mark.trainers
@pytest.mark.parametrize("options", ["", "rows_per_chunk=5"])
@pytest.mark.parametrize("imports", ["import accelerate", "import torch, accelerate"])
def test_programs_that_only_read_a_config_file_ask_by_a_variable(imports: str, options: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    assert run_python(imports + CONFIG_FILE, tmp_path, MEMFINE_OPTIONS=options) == "memfine"


STATE = """
import importlib.util, json, sys
import torch, torch._dynamo.config

names = "accelerate datasets deepspeed lightning llamafactory peft torchtitan transformers trl".split()
for name in filter(importlib.util.find_spec, names):
    __import__(name)
modules = {name: module for name, module in list(sys.modules.items()) if not name.startswith("memfine_fx")}
owners = list(modules.items())
for name, module in modules.items():
    owners += [(f"{name}.{key}", value) for key, value in list(vars(module).items()) if isinstance(value, type)]
functions = [(name, key, value) for name, owner in owners for key, value in list(vars(owner).items())]
home_of = lambda value: getattr(value, "__module__", "")
print(json.dumps({
    "finders": [str(getattr(finder, "__qualname__", type(finder))) for finder in sys.meta_path],
    "attributes": sorted((name, sorted(vars(module))) for name, module in modules.items()),
    "of ours": [(name, key) for name, key, value in functions if str(home_of(value)).startswith("memfine_fx")],
    "dynamo": {name: repr(value) for name, value in torch._dynamo.config.get_config_copy().items()},
}))
"""


def test_an_installed_package_changes_nothing_until_it_is_asked_for(tmp_path: Path) -> None:
    """The same state with entry points of `torch.backends` called and not called; all installed trainers' packages."""
    environment = {"PYTHONHASHSEED": "0", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    called = json.loads(run_python(STATE, tmp_path, **environment))
    not_called = json.loads(run_python(STATE, tmp_path, **environment, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
    for name, value in not_called.items():
        assert called[name] == value, name
    assert called["of ours"] == []


def test_a_module_in_whose_midst_we_are_imported_is_told_once_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "host.py").write_text("import ours\nNAME = 3\n")
    (tmp_path / "ours.py").write_text(
        "from memfine_fx.compat.loading import tell_when_loaded\n"
        "tell_when_loaded('host', lambda host: print(host.NAME))\n"
    )
    assert run_python("import host\nprint('loaded')\nimport wave", tmp_path) == "loaded\n3"


@pytest.mark.parametrize(
    ("asked", "loaded"),
    [
        ({}, []),
        ({"MEMFINE_OPTIONS": ""}, ["", ".compat", ".compat.loading", ".compiler", ".compiler.registration"]),
    ],
)
def test_importing_torch_loads_little_of_an_installed_package(
    asked: dict[str, str], loaded: list[str], tmp_path: Path
) -> None:
    """Nothing, or where it is asked for the watchers alone, also once somebody compiles by another backend."""
    source = """
import sys, torch
ours = {name for name in sys.modules if name.partition(".")[0] == "memfine_fx"}
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
assert ours == {name for name in sys.modules if name.partition(".")[0] == "memfine_fx"}, "compiling loads more"
print(sorted(ours))
"""
    assert run_python(source, tmp_path, **asked) == str([f"memfine_fx{name}" for name in loaded])


def test_a_torch_that_loads_nothing_by_itself_still_finds_the_backend(tmp_path: Path) -> None:
    source = """
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import sys, torch
assert "memfine_fx" not in sys.modules
"""
    assert run_python(source + COMPILE, tmp_path) == "7.0"


def test_the_import_loads_nothing_large(tmp_path: Path) -> None:
    """Sympy is most of what an import of the whole package takes; whoever compiles anything loads it."""
    source = """
import sys, torch
heavy = {"torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "networkx", "sympy"}
heavy |= {"memfine_fx.compiler.pipeline"}
before = set(sys.modules) & {"sympy"}
import memfine_fx
print(sorted((heavy - before) & set(sys.modules)))
"""
    assert run_python(source, tmp_path) == "[]"


@pytest.mark.trainers
@pytest.mark.parametrize("imports", ["import accelerate, memfine_fx", "import memfine_fx, accelerate"])
def test_accelerate_takes_the_name(imports: str, tmp_path: Path) -> None:
    """What `TrainingArguments(torch_compile_backend="memfine")` asks of it."""
    pytest.importorskip("accelerate")
    source = """
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
assert TorchDynamoPlugin(backend="memfine").to_kwargs()["backend"] == "memfine"
assert DynamoBackend("INDUCTOR") is DynamoBackend.INDUCTOR
assert "MEMFINE" in DynamoBackend.list()
print("taken")
"""
    assert run_python(imports + source, tmp_path) == "taken"


HAND_OVER = """
import dataclasses, enum, sys, types, torch
from torch import nn

class Backend(enum.StrEnum):
    NO = "NO"
    MEMFINE = "MEMFINE"

@dataclasses.dataclass
class Plugin:
    backend: Backend = Backend.MEMFINE
    mode: str = "default"
    fullgraph: bool = False
    dynamic: bool | None = None
    options: dict | None = None
    disable: bool = False

class Accelerator:
    def __init__(self, **settings):
        self.state = types.SimpleNamespace(dynamo_plugin=Plugin(**settings))
    def prepare_model(self, model, device_placement=None):
        return model, self.state.dynamo_plugin.backend.value

module = sys.modules["accelerate.accelerator"] = types.ModuleType("accelerate.accelerator")
module.Accelerator = Accelerator
import memfine_fx
from memfine_fx.compiler.optimized import optimized_call
from memfine_fx.compiler.registration import register_backend
register_backend()  # a module that was not imported is not watched
"""


def test_a_model_that_accelerate_compiles_by_the_name_is_optimized_before(tmp_path: Path) -> None:
    """A class like accelerate's: what it is asked, and that it compiles nothing itself."""
    source = (
        HAND_OVER
        + """
model = nn.Linear(2, 2)
accelerator = Accelerator(options={"rows_per_chunk": 5})
assert accelerator.prepare_model(model, device_placement=True) == (model, "NO")
assert accelerator.state.dynamo_plugin.backend is Backend.MEMFINE
call = optimized_call(model)
assert call is not None and call.session.config.rows_per_chunk == 5
accelerator.prepare_model(model)
assert optimized_call(model) is call, "a model that is optimized already stays so"
for settings in ({"backend": Backend.NO}, {"mode": "max-autotune-no-cudagraphs"}, {"disable": True}):
    other, accelerator = nn.Linear(2, 2), Accelerator(**settings)
    assert accelerator.prepare_model(other) == (other, accelerator.state.dynamo_plugin.backend.value)
    assert optimized_call(other) is None
compiled = torch.compile(nn.Linear(2, 2))
assert Accelerator().prepare_model(compiled) == (compiled, "MEMFINE") and optimized_call(compiled) is None
try:
    Accelerator(options={"colour": 3}).prepare_model(nn.Linear(2, 2))
except memfine_fx.ConfigError as error:
    print(error)
"""
    )
    assert "unknown option 'colour'" in run_python(source, tmp_path)
