"""Trainer ranks: process groups, CPU affinity, disk-full handling, and parallelism over tokens and experts."""
