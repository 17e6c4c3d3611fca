"""What runs on each host: functions that read or try something there and return facts. They judge nothing."""
