"""What a configuration means: one reading for the live world and the simulated one.

    config ── places_of ──> which nodes ── nodes_of ──> what each of them is (`NodeFacts`)
           ── rules_of ──> how the conductor decides

Files of models, curves and hardware are read here; no process is started and no memory taken.
"""

from isthmus.deploy.clusters import Cluster, at_home, clusters_of, role_config
from isthmus.deploy.costs import (
    PROFILES,
    chunking_of,
    codec_dtype,
    cost_of,
    gpus_of,
    hardware_of,
    read_mapping,
)
from isthmus.deploy.facts import NodeFacts, Sequences
from isthmus.deploy.places import Place, places_of
from isthmus.deploy.rates import UNLIMITED, Rates, bytes_per_s, rates_of
from isthmus.deploy.reading import (
    MAX_EMULATED_TOKENS,
    MIN_SLOTS,
    TRANSIT,
    kv_memory_of,
    nodes_of,
    role_facts,
    sequences_of,
)
from isthmus.deploy.rules import CODECS, links_of, rules_of

__all__ = [
    "CODECS",
    "MAX_EMULATED_TOKENS",
    "MIN_SLOTS",
    "PROFILES",
    "TRANSIT",
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
    "codec_dtype",
    "cost_of",
    "gpus_of",
    "hardware_of",
    "kv_memory_of",
    "links_of",
    "nodes_of",
    "places_of",
    "rates_of",
    "read_mapping",
    "role_config",
    "role_facts",
    "rules_of",
    "sequences_of",
]
