"""Dynamo: what traced Python code has changed beside tensors, asked while it traces.

A graph shows what code does to tensors. What it does to attributes, containers, closures and Python's generator of
random numbers Dynamo keeps in records of its own, and replays after the graph has run. `PythonState` is what these
records say at one moment, so that two moments can be compared.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from memfine_fx.compat.checks import Feature, expect

__all__ = [
    "PYTHON_EFFECTS",
    "PythonState",
    "changed_objects",
    "compile_time_calls",
    "graph_being_traced",
    "has_caller",
    "is_same_value",
    "line_being_traced",
    "local_value",
    "module_being_traced",
    "python_operator",
]

_TRANSLATOR = "_i_will_not_complain_if_bc_breaks_InstructionTranslator"
_VARIABLE = "_i_will_not_complain_if_bc_breaks_VariableTracker"
_DEPTH = 4
_POSITIONS = ("index", "is_exhausted", "advance_count")
"""Attributes of iterators that say how far they have come."""
_IN_PLACE = frozenset("iadd isub imul itruediv ifloordiv imod ipow iand ior ixor".split())


@dataclass
class PythonState:
    """Attributes, containers and random draws at one moment of a trace.

    Args:
        known: ids of the variables that exist.
        entries: what each attribute or container holds, by the id of its variable; the variables are held too.
        written: ids of variables that existed before the trace and are recorded as changed.
    """

    known: set[int] = field(default_factory=set)
    entries: dict[tuple[int, str], tuple[Any, ...]] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    held: list[Any] = field(default_factory=list)
    ignored: set[int] = field(default_factory=set)
    num_draws: int = 0

    @staticmethod
    def of(context: Any, depth: int) -> PythonState:
        """Return the state as seen from the frame `depth` calls above the one that asks.

        Args:
            context: that `torch._dynamo.comptime` hands over.
        """
        frame = _frame(context, depth)
        effects, state = frame.output.side_effects, PythonState(num_draws=len(frame.output.random_calls))
        for variable, attributes in effects.store_attr_mutations.items():
            state._add(variable)
            for name, value in attributes.items():
                state.entries[id(variable), name] = (value,)
                state._add_deep(value, _DEPTH)  # the content of a cell, for one
        for variable in effects.id_to_variable.values():
            state._add_deep(variable, 1)
        for variable in frame.symbolic_locals.values():
            state._add_deep(variable, _DEPTH)
        return state

    def _add(self, variable: Any) -> None:
        self.known.add(id(variable))
        self.held.append(variable)
        mutation = _mutation_of(variable)
        if mutation == "AttributeMutationExisting" or getattr(variable.mutation_type, "is_modified", False):
            self.written.add(id(variable))

    def _add_deep(self, variable: Any, depth: int) -> None:
        """Add what a variable holds; one that is not yet made of its value was not touched."""
        if type(variable).__name__ == "LazyVariableTracker":
            if not variable.is_realized():
                return
            variable = variable.realize()
        if depth == 0 or (id(variable) in self.known and depth == 1):
            return
        self._add(variable)
        is_container = _mutation_of(variable).startswith("Value")
        position = [getattr(variable, name) for name in _POSITIONS if hasattr(variable, name)]
        position += [operator.length_hint(variable._iter)] if hasattr(variable, "_iter") else []
        if position and is_container:
            self.entries[id(variable), "position"] = tuple(position)
        for name, content in list(vars(variable).items()):
            if is_container and isinstance(content, (list, dict)):
                self.entries[id(variable), name] = _flat(content)
                for inner in _flat(content):
                    if hasattr(inner, "mutation_type"):
                        self._add_deep(inner, depth - 1)
            elif _mutation_of(content).startswith("Value"):  # what a subclass of a list or a dictionary holds
                self._add_deep(content, depth - 1)

    def _holds_own_tensors(
        self, key: tuple[int, str], content: tuple[Any, ...], is_accounted: Callable[[Any], bool]
    ) -> bool:
        """Whether an attribute, or the dictionary of a module's buffers, holds the tensors that it held: inputs of the
        graph that were written in place, or what the graph chooses."""
        own = _source_of(next((variable for variable in self.held if id(variable) == key[0]), None))
        names: tuple[Any, ...] = (key[1],)
        if own.endswith("._buffers"):
            middle = len(content) // 2
            names, content = (
                tuple(getattr(entry_key, "vt", entry_key) for entry_key in content[:middle]),
                content[middle:],
            )
            names = tuple(constant[0] for constant in map(_constant, names) if constant is not None)
        are_own = (_is_entry(own, *entry) or is_accounted(entry[1]) for entry in zip(names, content, strict=False))
        return bool(own) and len(names) == len(content) and all(are_own)

    def let_grow(self, container: Any) -> None:
        """Leave a container out of the comparison with later moments."""
        self.ignored.add(id(container))

    def has_changed(self, before: PythonState, is_accounted: Callable[[Any], bool]) -> bool:
        """Return whether anything is another that existed at the moment before.

        A tensor that was written in place and bound again (`self.count += 1`) is the same one.

        Args:
            is_accounted: whether a new value of an attribute is no change.
        """
        if self.num_draws != before.num_draws:
            return True
        for key, content in self.entries.items():
            if key[0] in before.ignored or (len(content) == 1 and is_accounted(content[0])):
                continue
            if self._holds_own_tensors(key, content, is_accounted):
                continue
            if key in before.entries:
                if not _are_same(content, before.entries[key]):
                    return True
            # An attribute that appears is a change of its object, unless the object is new as well.
            elif content and (key[0] in before.known or key[0] in self.written):
                return True
        return False


def changed_objects() -> list[object]:
    """Return the Python objects of the user's that the code changes which Dynamo is compiling now.

    Returns:
        Modules, containers, cells and other objects; the names of globals that are bound.
    """
    translator = importlib.import_module("torch._dynamo.symbolic_convert").InstructionTranslator.current_tx()
    effects = translator.output.side_effects
    objects = {id(item): item for item in effects.keepalive}
    changed: list[object] = []
    for key, variable in effects.id_to_variable.items():
        if type(variable).__name__ == "NewGlobalVariable":
            changed.extend(effects.store_attr_mutations.get(variable, ()))
        elif key in objects and "Existing" in _mutation_of(variable) and effects.is_modified(variable):
            changed.append(objects[key])
    return changed


def python_operator(target: Any) -> str:
    """Return the name "namespace::name" of an operator that is written in Python; "" for any other."""
    name = str(getattr(getattr(target, "_schema", None), "name", "") or getattr(target, "_qualified_op_name", ""))
    return name if name in importlib.import_module("torch._library.custom_ops").OPDEFS else ""


def _source_of(variable: Any) -> str:
    """Return the Python expression from which Dynamo takes a variable; "" for a variable that Dynamo made."""
    source = getattr(variable, "source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def _node_of(variable: Any) -> Any:
    """The node of the graph that computes a tensor or a size."""
    return getattr(getattr(variable, "proxy", None), "node", None)


def _mutation_of(variable: Any) -> str:
    """Which kind of change Dynamo records of a variable: of a container's value or of attributes, old or new."""
    return type(getattr(variable, "mutation_type", None)).__name__


def _is_entry(own: str, name: str, value: Any) -> bool:
    """Whether a value is what an object has under a name, or that tensor written in place."""
    node = _written_input(_node_of(value))
    source = _source_of(value) or _source_of(None if node is None else node.meta.get("grapharg"))
    return source.startswith(own) and source.endswith((f".{name}", f"['{name}']"))


def _written_input(node: Any) -> Any:
    """The graph's input that operations in place give back, step by step; None where another operation gives it."""
    while node is not None and node.op != "placeholder":
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        is_in_place = name.endswith("_") or name in _IN_PLACE
        node = node.args[0] if is_in_place and node.args and hasattr(node.args[0], "op") else None
    return node


def _flat(content: Any) -> tuple[Any, ...]:
    return tuple(content) if isinstance(content, list) else (*content.keys(), *content.values())


def _are_same(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    return len(left) == len(right) and all(map(is_same_value, left, right))


def is_same_value(left: Any, right: Any) -> bool:
    """Return whether two of Dynamo's variables are one, stand for one object or are equal constants of one type."""
    if left is right:
        return True
    constants = [_constant(value) for value in (left, right)]
    if None in constants:
        sources, nodes = (
            [_source_of(variable) for variable in (left, right)],
            [_node_of(variable) for variable in (left, right)],
        )
        if sources[0] == sources[1] != "" or nodes[0] is nodes[1] is not None:
            return True
        return bool(type(left) is type(right) and not hasattr(left, "mutation_type") and left == right)
    left_value, right_value = (constant[0] for constant in constants if constant is not None)
    return type(left_value) is type(right_value) and bool(left_value == right_value)


def _constant(variable: Any) -> tuple[Any] | None:
    is_constant = getattr(variable, "is_python_constant", None)
    if is_constant is None or not is_constant():
        return None
    value = variable.as_python_constant()
    return (value,) if isinstance(value, (int, float, str, bytes, complex, type(None), type(...))) else None


def local_value(context: Any, name: str) -> Any:
    """Return Dynamo's variable of a local name, in the frame that asks."""
    return getattr(context.get_local(name), _VARIABLE)()


def graph_being_traced(context: Any) -> Any:
    """Return the graph that a trace makes; a trace that begins again makes another."""
    return _frame(context, 0).output.graph


def compile_time_calls() -> Any:
    """Return the function that calls another while Dynamo traces, handing over what it knows, and else does nothing."""
    return importlib.import_module("torch._dynamo.comptime").comptime


def has_caller(context: Any) -> bool:
    """Return whether the frame that asks is traced as part of the one that calls it."""
    return _frame(context, 0).parent is not None


def module_being_traced(context: Any) -> str:
    """Return the path of the module whose code is traced, as nodes of the graph have it; "" where there is none."""
    stack = list(_frame(context, 0).nn_module_stack.values())
    return str(stack[-1][0]) if stack else ""


def line_being_traced(context: Any, depth: int) -> str:
    """Return the place "file:line" of the code that is traced in the frame `depth` calls above the one that asks."""
    frame = _frame(context, depth)
    return f"{frame.f_code.co_filename}:{frame.lineno}"


def _frame(context: Any, depth: int) -> Any:
    frame = getattr(context, _TRANSLATOR)()
    for _ in range(depth):
        frame = frame.parent
    return frame


def _check() -> None:
    comptime = importlib.import_module("torch._dynamo.comptime")
    for owner, name in ((comptime.ComptimeContext, _TRANSLATOR), (comptime.ComptimeVar, _VARIABLE)):
        expect(hasattr(owner, name), f"{owner.__name__} has no {name}")
    effects = importlib.import_module("torch._dynamo.side_effects").SideEffects
    for name in ("id_to_variable", "store_attr_mutations", "keepalive"):
        expect(name in effects.__annotations__, f"SideEffects has no {name}")
    base = importlib.import_module("torch._dynamo.variables.base")
    for name in ("ValueMutationExisting", "AttributeMutationExisting"):
        expect(hasattr(base, name), f"there is no {name}")
    shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    expect(callable(shapes.guard_or_false) and callable(shapes.guard_or_true), "conditions cannot be left open")


PYTHON_EFFECTS = Feature(
    name="torch._dynamo.side_effects.SideEffects",
    package="torch",
    purpose="knowing which Python objects a layer changes: proving that a skipped body changes none, and comparing a "
    "layer with its own code only where all are put back",
    seen=("2.13", "2.13"),
    fallback="Loops that skip experts without rows stay as they are written, and are not chunked; no layer is compared "
    "with its own code.",
    check=_check,
)
