"""Which small changes a mutant may be, and where.

cosmic-ray's, and one of ours: to leave a statement out. Left alone are words (annotations, docstrings, `__repr__`),
logging, assertions and `check` (tests themselves), and constants with a name (a choice, not a rule).
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator
from parso.python.tree import Keyword

from tests.scratch import ROOT

COMPARISONS = "Eq_NotEq NotEq_Eq Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Is_IsNot IsNot_Is"
SUMS = "Add_Sub Sub_Add Mul_FloorDiv Div_Mul FloorDiv_Mul Mod_FloorDiv BitOr_BitAnd BitAnd_BitOr"
OTHERS = (
    "AddNot ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr ReplaceOrWithAnd ReplaceBreakWithContinue"
    " ReplaceContinueWithBreak ExceptionReplacer NumberReplacer ZeroIterationForLoop"
    " ReplaceUnaryOperator_Delete_Not ReplaceUnaryOperator_Delete_USub"
)
WORDS = ("__repr__", "__str__", "check", "check_idle")


class DropStatement(Operator):
    """Leaves out one call, refusal or change of state."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.type == "simple_stmt" and _acts(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.children[0] = Keyword("pass", node.start_pos, node.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


def _acts(statement: Any) -> bool:
    """A plain name that is never bound would fail at once: of bindings, only those that others see."""
    if statement.type == "expr_stmt":
        target, sign = statement.children[:2]
        if sign.type == "annassign" and "=" not in sign.children:
            return False
        return target.type == "atom_expr" or (sign.type == "operator" and sign.value != "=")
    return statement.type in ("atom_expr", "raise_stmt", "del_stmt")


def operators() -> dict[str, Operator]:
    named = [f"ReplaceComparisonOperator_{name}" for name in COMPARISONS.split()]
    named += [f"ReplaceBinaryOperator_{name}" for name in SUMS.split()] + OTHERS.split()
    return {name: get_operator(f"core/{name}")() for name in named} | {"DropStatement": DropStatement()}


class Mutant(NamedTuple):
    path: str
    line: int
    operator: str
    old: str
    new: str
    code: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.path, self.old, self.new

    @property
    def can_be_read(self) -> bool:
        """Else whoever imports it finds it."""
        try:
            return bool(ast.parse(self.code))
        except SyntaxError:
            return False


def quiet(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """What is left alone, as (line, column) from and to."""
    for owner in ast.walk(ast.parse(source)):
        for node in _quiet_parts(owner):
            yield (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _quiet_parts(node: Any) -> Iterator[Any]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from [
                *node.decorator_list,
                *filter(None, [node.returns]),
                *([node] if node.name in WORDS else []),
            ]
        case ast.Module() | ast.ClassDef():
            yield from [*getattr(node, "decorator_list", []), *getattr(node, "keywords", [])]
            yield from (part for part in node.body if isinstance(part, (ast.Assign, ast.AnnAssign)))
        case ast.arg() | ast.AnnAssign():
            yield from filter(None, [node.annotation])
        case ast.Assert() | ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "log"))):
            yield node
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.keyword(arg="strict"):
            yield node


def places(path: Path) -> list[list[tuple[str, int]]]:
    """Each place of a file where something can be changed: the operators that fit, with their occurrences."""
    source = path.read_text()
    spans, nodes = list(quiet(source)), list(ast_nodes(get_ast(source)))
    found: dict[Any, list[tuple[str, int]]] = {}
    for name, operator in operators().items():
        at = (position for node in nodes for position in operator.mutation_positions(node))
        for occurrence, position in enumerate(at):
            if not any(start <= position[0] and position[1] <= end for start, end in spans):
                found.setdefault(position, []).append((name, occurrence))
    return [found[position] for position in sorted(found)]


def mutant(path: str, operator: str, occurrence: int) -> Mutant:
    source = (ROOT / path).read_text()
    code = mutate_code(source, operators()[operator], occurrence)
    lines = list(difflib.unified_diff(source.splitlines(), code.splitlines(), n=0, lineterm=""))[2:]
    old, new = ("\n".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "-+")
    return Mutant(path, int(lines[0].split()[1].split(",")[0][1:]), operator, old, new, code)
