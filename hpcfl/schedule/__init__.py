"""Who is invited, when a round closes, how far each visit comes, and what that costs."""
