"""What a chat is as text: templates by name, and what ends a response."""
