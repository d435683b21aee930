"""What is watched in every batch while a policy trains: measures of texts, limits from SFT, alarms."""
