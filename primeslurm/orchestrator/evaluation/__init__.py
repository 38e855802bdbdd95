"""Evaluation of the policy while it is trained: when, which rollouts, and what they say."""
