"""All papers and published tables by name."""

from __future__ import annotations

import difflib

from isthmus.core.errors import ConfigError
from isthmus.lab.papers import infinite_llm, lamina, mooncake, prfaas, sarathi, semsharekv
from isthmus.lab.papers.table import Table

PAPERS: dict[str, tuple[Table, ...]] = {
    "infinite-llm": infinite_llm.TABLES,
    "lamina": lamina.TABLES,
    "mooncake": mooncake.TABLES,
    "prfaas": prfaas.TABLES,
    "sarathi": sarathi.TABLES,
    "semsharekv": semsharekv.TABLES,
}
"""Paper -> its tables, each named `<paper>-<table>`."""

TABLES: dict[str, Table] = {table.name: table for tables in PAPERS.values() for table in tables}


def named(name: str) -> tuple[Table, ...]:
    """One table, or all of a paper. Raises ConfigError naming the nearest name."""
    if name in PAPERS:
        return PAPERS[name]
    if name in TABLES:
        return (TABLES[name],)
    known = [*PAPERS, *TABLES]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    raise ConfigError(f"no published table is named {name!r}; {hint}")
