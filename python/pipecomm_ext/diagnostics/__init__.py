"""Diagnostics of an installation (info, doctor) and of a run that failed or hangs (flight reports)."""
