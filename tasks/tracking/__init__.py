"""Send what runs have written to MLflow. No other package imports MLflow."""
