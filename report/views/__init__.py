"""Views: what verbs and writers show of a capture besides its profile, a module for each."""
