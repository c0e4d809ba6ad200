def render(record):
    return []


def aims(record):
    return []


def projection(record):
    return []
