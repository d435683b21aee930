"""The command line; nothing else imports typer."""
