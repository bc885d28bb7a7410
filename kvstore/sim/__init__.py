"""The world around the core in virtual time: memory, disk, workers, faults, and checks after every event."""
