"""What outlives a step: incidents of state that turned bad, and who wrote what a step found so."""
