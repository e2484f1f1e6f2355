"""Several agents in one environment: environments, policies by agent, runners."""
