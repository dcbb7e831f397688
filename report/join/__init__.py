"""Who launched what stalled: placements, lifetimes, launches and stalls, joined by whole columns."""
