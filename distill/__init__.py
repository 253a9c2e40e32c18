"""Data in the target's own words: prompts, the target's answers to them, and the rows a drafter is trained on."""
