"""The simulated world: virtual time, networks, disks, faults, workloads, reports."""
