"""What tests share: small runs and problems, and jobs that they start."""
