// Hands a file to the browser: props.value = {name, data (base64), serial}.
function save() {
  const given = props.value;
  if (!given?.data) return;
  const bytes = Uint8Array.from(atob(given.data), (letter) => letter.charCodeAt(0));
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([bytes]));
  link.download = given.name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

watch('value', save);
