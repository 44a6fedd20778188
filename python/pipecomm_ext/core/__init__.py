"""The base of the package: the extension module, settings, rendezvous, flight records."""
