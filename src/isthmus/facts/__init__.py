"""What a configuration means: one reading for the live world and the simulated one.

    config ── places_of ──> which nodes ── nodes_of ──> what each of them is (`NodeFacts`)
           ── rules_of ──> how the conductor decides
           ── shaped ──> the same with nodes that suit this machine, where it names none

Files of models, curves and hardware are read here; no process is started and no memory taken.
"""

from isthmus.facts.facts import PROFILES as PROFILES
from isthmus.facts.facts import UNLIMITED as UNLIMITED
from isthmus.facts.facts import NodeFacts as NodeFacts
from isthmus.facts.facts import Rates as Rates
from isthmus.facts.facts import Sequences as Sequences
from isthmus.facts.facts import bytes_per_s as bytes_per_s
from isthmus.facts.facts import chunking_of as chunking_of
from isthmus.facts.facts import cost_of as cost_of
from isthmus.facts.facts import gpus_of as gpus_of
from isthmus.facts.facts import hardware_of as hardware_of
from isthmus.facts.places import ClusterPlace as ClusterPlace
from isthmus.facts.places import Place as Place
from isthmus.facts.places import at_home as at_home
from isthmus.facts.places import clusters_of as clusters_of
from isthmus.facts.places import for_role as for_role
from isthmus.facts.places import node_threads as node_threads
from isthmus.facts.places import places_of as places_of
from isthmus.facts.places import role_config as role_config
from isthmus.facts.places import rooted as rooted
from isthmus.facts.places import shaped as shaped
from isthmus.facts.reading import kv_memory_of as kv_memory_of
from isthmus.facts.reading import nodes_of as nodes_of
from isthmus.facts.reading import role_facts as role_facts
from isthmus.facts.rules import links_of as links_of
from isthmus.facts.rules import make_known as make_known
from isthmus.facts.rules import own_names as own_names
from isthmus.facts.rules import rules_of as rules_of
from isthmus.facts.rules import shares_of as shares_of
