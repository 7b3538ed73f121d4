"""What the lab speaks of: cases, records, implementations, events, devices. No logic of any stage."""
