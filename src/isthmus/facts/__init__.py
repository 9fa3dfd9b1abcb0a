"""What a configuration means: one reading for the live world and the simulated one.

    config ── places_of ──> which nodes ── nodes_of ──> what each of them is (`NodeFacts`)
           ── rules_of ──> how the conductor decides
           ── shaped ──> the same with nodes that suit this machine, where it names none

Files of models, curves and hardware are read here; no process is started and no memory taken.
"""

from isthmus.facts.costs import PROFILES, chunking_of, cost_of, gpus_of, hardware_of
from isthmus.facts.facts import UNLIMITED, NodeFacts, Rates, Sequences, bytes_per_s
from isthmus.facts.places import (
    Cluster,
    Place,
    at_home,
    clusters_of,
    for_role,
    node_threads,
    places_of,
    role_config,
    rooted,
    shaped,
)
from isthmus.facts.reading import kv_memory_of, nodes_of, role_facts
from isthmus.facts.rules import links_of, make_known, own_names, rules_of, shares_of

__all__ = [
    "PROFILES",
    "UNLIMITED",
    "Cluster",
    "NodeFacts",
    "Place",
    "Rates",
    "Sequences",
    "at_home",
    "bytes_per_s",
    "chunking_of",
    "clusters_of",
    "cost_of",
    "for_role",
    "gpus_of",
    "hardware_of",
    "kv_memory_of",
    "links_of",
    "make_known",
    "node_threads",
    "nodes_of",
    "own_names",
    "places_of",
    "role_config",
    "role_facts",
    "rooted",
    "rules_of",
    "shaped",
    "shares_of",
]
