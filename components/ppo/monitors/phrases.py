"""English phrases of refusal and agreement, in lower case, that the alarms and the rules of probes share."""

REFUSALS = ("i cannot help", "i can't help", "as an ai", "i am unable to", "cannot assist", "can't assist")
AGREEMENTS = ("you are right", "you're right", "i agree", "you are absolutely right", "you're absolutely right")
