"""Any two or more models judged by people, blind, two responses at a time."""
