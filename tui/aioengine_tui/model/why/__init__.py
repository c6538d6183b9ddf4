"""Why: what a waiting request waits for, what made a token slow, and which setting to change. Functions from a state to frozen values."""
