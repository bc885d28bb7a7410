"""What a caller asks for, one file a kind: leases, saves, sessions, hints, recalls."""
