"""The schedule as a value: actions, slots, schedules, their text and their checker."""
