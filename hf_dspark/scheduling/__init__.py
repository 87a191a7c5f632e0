"""How many drafts are worth verifying: calibrated confidence, measured costs, the scheduler."""
