"""The forms in which methods' source is rewritten, each with an example and the rows of the table that need it.

Rows are those that were no longer whole when `explain` ran with this form switched off alone.
"""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass

from memfine_fx.capture.source.helpers import PREFIX
from memfine_fx.capture.source.loops import rewrite_function

__all__ = ["FORMS", "Form"]


@dataclass(frozen=True)
class Form:
    """One form.

    Args:
        name: what is rewritten, in words.
        rows: of the table, families and spellings, that are lost without it.
        before: an example, as written.
    """

    name: str
    rows: tuple[str, ...]
    before: str

    @property
    def after(self) -> str:
        """The example rewritten, the helpers' names without the prefix that keeps them apart from a model's."""
        tree = ast.parse("def forward(self, x, index, loss=None):\n" + textwrap.indent(self.before, "    "))
        (function,) = tree.body
        assert isinstance(function, ast.FunctionDef)
        rewrite_function(function)
        statements = [ast.unparse(ast.fix_missing_locations(one)) for one in function.body]
        return "\n".join(statements).replace(PREFIX, "")


def _form(name: str, rows: tuple[str, ...], before: str) -> Form:
    return Form(name, rows, textwrap.dedent(before).strip())


FORMS = (
    _form(
        "Rows are counted per expert: a count of known size",
        (
            "expert loop, split",
            "list of experts, ends",
            "list of experts, written",
            "list of experts, filled",
            "list of experts, permuted",
        ),
        """
        counts = torch.bincount(index.view(-1), minlength=self.num_experts).tolist()
        """,
    ),
    _form(
        "A loop over the experts that were hit runs every expert that has weights",
        ("dbrx", "longcat_flash", "nllb_moe", "expert loop, hit"),
        """
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit:
            e = e[0]
            choice, token = torch.where(mask[e])
            out.index_add_(0, token, x[token] @ self.up[e])
        """,
    ),
    _form(
        "A loop over the experts that an index names runs every expert",
        ("list of experts, named", "list of experts, chosen"),
        """
        for e in index.unique():
            token, choice = torch.where(index == e)
            out.index_add_(0, token, self.experts[e](x[token]))
        """,
    ),
    _form(
        "A body that experts without rows skip is run for them, with marks by which that is proved to do nothing",
        (
            "longcat_flash",
            "expert loop, guarded",
            "expert loop, asked",
            "list of experts, valid",
            "list of experts, gates",
            "list of experts, lists",
            "list of experts, zeros",
            "list of experts, counted",
        ),
        """
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(index == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]))
            loss = loss + weight[token, choice].mean()
        """,
    ),
    _form(
        "Adding zeros for an expert without rows goes with its branch",
        ("list of experts, zeros", "expert loop, results"),
        """
        for e, expert in enumerate(self.experts):
            mask = index == e
            if mask.any():
                out[mask] += expert(x[mask])
            elif self.training:
                out[0, 0] += 0 * sum(p.sum() for p in expert.parameters())
        """,
    ),
    _form(
        "Places made into a list stay a tensor where they only index",
        ("list of experts, lists",),
        """
        for e in range(4):
            choice, token = torch.where(mask[e])
            places = token.tolist()
            out.index_add_(0, token, self.experts[e](x[None, places]))
        """,
    ),
    _form(
        "Slices by running offsets become parts of one split",
        ("list of experts, running", "list of experts, filled"),
        """
        counts = self.count(index).cpu().numpy()
        start = 0
        for e, num in enumerate(counts):
            end = start + num
            if num == 0:
                continue
            outs.append(self.experts[e](x[start:end]))
            start = end
        """,
    ),
    _form(
        "Slices between ends that are summed up before the loop do too",
        ("list of experts, ends",),
        """
        ends = self.count(index).cpu().numpy().cumsum(0)
        for e, end in enumerate(ends):
            start = 0 if e == 0 else ends[e - 1]
            if start == end:
                continue
            outs.append(self.experts[e](x[start:end]))
        """,
    ),
    _form(
        "So do ends that are read one by one; rows written at such a slice are put in their place",
        ("list of experts, written", "list of experts, filled"),
        """
        ends = self.count(index).cumsum(0)
        rows = torch.empty_like(x)
        start = 0
        for e in range(4):
            end = int(ends[e])
            if end > start:
                rows[start:end] = self.experts[e](x[start:end])
            start = end
        """,
    ),
)
