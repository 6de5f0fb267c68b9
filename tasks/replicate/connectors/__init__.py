"""The connectors that come with Claimcheck, a module or package for each engine."""
