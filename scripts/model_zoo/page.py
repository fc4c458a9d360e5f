def page(lines):
    return "# Supported models\n"
