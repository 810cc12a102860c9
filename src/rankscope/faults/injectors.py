"""All injectors: importing this module registers every fault and look-alike."""

from rankscope.faults import data_faults, healthy, numerics_faults, state_faults, sync_faults
from rankscope.faults.job import INJECTORS

__all__ = ["INJECTORS", "data_faults", "healthy", "numerics_faults", "state_faults", "sync_faults"]
