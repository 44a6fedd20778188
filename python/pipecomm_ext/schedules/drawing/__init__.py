"""Pictures of plans and timelines."""
